"""Quantise models after training: calibrate, insert QuantizeLinear and DequantizeLinear, measure the noise."""

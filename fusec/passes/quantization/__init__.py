"""Run quantised models in integers: exact products of 8-bit integers, and quantisation moved next to them."""

"""Generate kernels for LSTM, GRU and RNN."""

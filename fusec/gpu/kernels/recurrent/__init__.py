"""Generate kernels for LSTM, GRU and RNN, and for linear recurrences."""

"""Generate random graphs, arrays and Hypothesis examples, and encode them."""

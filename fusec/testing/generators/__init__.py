"""Generate random graphs and arrays with Hypothesis."""

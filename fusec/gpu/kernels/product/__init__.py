"""Generate products of matrices whose operands some warps copy while others multiply."""

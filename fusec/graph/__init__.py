"""Define what `fusec.ir` is made of: types, ops, constants, and how a graph is printed and verified."""

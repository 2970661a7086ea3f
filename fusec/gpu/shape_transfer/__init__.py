"""Carry tuned choices and plans over to other input shapes."""

"""Rewrite rules that recognise ops in the forms they are exported as."""

"""Write the pages and tables of docs/ from result files and code."""

"""The stages of `fusec.driver.compile`, a file each: build the program, choose who judges it, prepare it for a GPU."""

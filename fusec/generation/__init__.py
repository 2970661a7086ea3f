"""Generate tokens with a decoder whose key/value cache stays on the device: `fusec.Generator`."""

"""`rope-patch eval` and `rope-patch probe`."""

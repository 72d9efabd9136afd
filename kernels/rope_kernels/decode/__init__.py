"""Attention of one new token a row, over keys and values in buffers."""

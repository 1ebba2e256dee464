"""Decoding over a cache of keys and values that is spread over ranks: `KVCache`, `tree_decode` and the rings."""

"""What a program calls: `MeshAttention`, `attention` and `merge`."""

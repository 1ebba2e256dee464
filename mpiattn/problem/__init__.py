"""The attention problem: its shapes, masks, documents and layouts, and tensors from callers."""

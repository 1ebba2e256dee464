"""What is asked: the attention problem, its masks, documents and layouts; tensors that callers give."""

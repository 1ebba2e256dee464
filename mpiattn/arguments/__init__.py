"""What callers give: arrays and tensors, memory for results, counts and keywords, checked before anything is done."""

"""What `cuops.rms_norm` is made of: the operators, and the way around PyTorch's dispatcher."""

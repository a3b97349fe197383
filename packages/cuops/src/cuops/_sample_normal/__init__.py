"""What `cuops.sample_normal` is made of: the numbers, the operators, and the ways of arrays and tensors."""

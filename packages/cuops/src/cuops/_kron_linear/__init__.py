"""What `cuops.kron_linear` is made of: the operators, and the ways of the forward and of the gradients."""

"""The operations of models and optimizers, twice: fast, and with the same bits on every machine.

`native` has the operations that PyTorch computes fast, and `portable` has the same names for --numerics=portable.
`attention` chooses the kernel that computes attention. `optim` has the optimizers, and the learning rate of a step.
"""

"""Training steps, turns and kernels on a stand-in for a GPU, on machines without one."""

"""Keep weights of trained networks in RAM while nothing computes with them."""

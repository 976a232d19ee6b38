"""Store the frozen weights of linear layers in fewer bytes."""

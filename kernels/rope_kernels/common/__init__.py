"""What operators of several families share: how an argument is refused, autocast, and where Triton runs."""

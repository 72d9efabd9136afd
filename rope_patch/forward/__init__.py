"""How one forward sees a view: the hooks, the state that they read, caches, draws and the step of the trainer.

`state_of(model)` is what other rooms ask; `RopeViewCallback` is public.
"""

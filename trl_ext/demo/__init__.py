"""The main job, small: measure, patch, fine-tune, measure again, save, reload."""

"""``sd-lowvram unet``: its commands."""

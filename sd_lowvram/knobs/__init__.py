"""Our knobs, each declared once, by what they are about: :class:`~sd_lowvram.settings.Settings` are all of them."""

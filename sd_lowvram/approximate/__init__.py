"""Less work for another picture: reused features, merged tokens, blended tiles. No plan chooses them by itself."""

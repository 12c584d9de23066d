"""Less work for another picture: reused features, merged tokens, blended tiles."""

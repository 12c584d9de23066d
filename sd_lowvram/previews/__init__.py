"""Small pictures of a run that is under way, by a linear map from latents to colours instead of the decoder."""

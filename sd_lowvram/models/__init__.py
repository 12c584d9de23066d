"""What the models are made of: the sites that hooks act on, found by duck typing."""

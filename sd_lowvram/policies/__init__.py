"""What other programs do with a model's memory, by name, so that it can be measured beside what we do."""

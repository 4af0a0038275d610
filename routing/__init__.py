"""From a model's name to the engine that answers for it."""

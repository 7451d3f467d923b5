"""From a configuration to a trained model: run, resume, evaluate, compare."""

"""The first host: transformers runs the model, sfi its attention and its cache."""

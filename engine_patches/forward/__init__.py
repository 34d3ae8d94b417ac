"""Inside the forward pass, in the model runner's process: recurrent states are written at any position."""

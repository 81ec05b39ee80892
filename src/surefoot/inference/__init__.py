"""What a trained model is used for: it is loaded, talked to, served and evaluated."""

"""An estimate of what a training run takes, before it is started: ``geonorm plan``."""

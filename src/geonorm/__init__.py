"""Where should a Transformer normalise? GeoNorm and the placements it is measured against."""

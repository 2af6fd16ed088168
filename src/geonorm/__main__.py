"""``python -m geonorm``."""

import sys

from geonorm.cli import main

sys.exit(main())

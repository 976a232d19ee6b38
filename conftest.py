"""No test asks a hub: models are fetched only from the server that a test starts itself
(see `hub_server`).
"""

import os

os.environ["DSTRAIN_SKIP_DOWNLOAD"] = "True"

pytest_plugins = ["tests.support.fixtures"]

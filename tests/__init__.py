# SPDX-License-Identifier: Apache-2.0

import os

# Read once, when torch loads: threads that spin while they wait take a machine of two cores from the other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

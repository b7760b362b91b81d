# SPDX-License-Identifier: Apache-2.0

import os

# Read once, when torch loads: threads that spin while they wait take a machine of two cores from the other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Ray gives its workers the lowest priority: other tests at the same time would take all of theirs.
os.environ.setdefault("RAY_worker_niceness", "0")

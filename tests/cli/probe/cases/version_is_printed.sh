# SPDX-License-Identifier: Apache-2.0
probe --version | sed -E 's/[0-9]+\.[0-9]+\.[0-9]+/<version>/'

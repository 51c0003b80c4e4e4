# SPDX-License-Identifier: Apache-2.0
probe $'in\nprobe: error: forged\e[2J' out --fail 4

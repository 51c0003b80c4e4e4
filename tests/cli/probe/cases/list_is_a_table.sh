# SPDX-License-Identifier: Apache-2.0
probe in --list --name model.layers.0.mlp.weight --name $'odd\e[31mname'
probe in --explain w

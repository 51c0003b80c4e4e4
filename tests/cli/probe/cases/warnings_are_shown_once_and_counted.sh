probe in out --warn same --warn same --warn other

"""One module at a time, with fakes around it: what real worker processes show elsewhere, but are not measured for."""

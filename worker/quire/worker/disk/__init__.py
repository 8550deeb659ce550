"""The disk below the host tier: copies of cached blocks in files, which outlive the worker.

    cachemgr                        event loop     threads            files
      DiskOrders  --> attachment --> disk_tier --> writer, reader --> store --> records
      DiskReport  <--------------------'

disk_tier   carries out orders beside the steps, and reports them
store       the directory: files of a fixed size, with a place for each disk block
records     the header of a copy: what it is, and the checksums
"""

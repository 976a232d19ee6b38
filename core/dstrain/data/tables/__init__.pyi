from dstrain.data.tables.finding import (
    ask as ask,
    find_source as find_source,
    installed_forms as installed_forms,
)
from dstrain.data.tables.form import Given as Given, Source as Source
from dstrain.data.tables.joined import (
    join_datasets as join_datasets,
    join_sources as join_sources,
)
from dstrain.data.tables.listing import (
    beside_table as beside_table,
    left_out as left_out,
)
from dstrain.data.tables.naming import (
    TEXT as TEXT,
    main_column as main_column,
    other_names as other_names,
    parse_columns as parse_columns,
)
from dstrain.data.tables.reading import Reading as Reading, texts_of as texts_of
from dstrain.data.tables.row_files import embedded_folder as embedded_folder

from dstrain.data.forms.finding import (
    ask as ask,
    find_source as find_source,
    installed_forms as installed_forms,
)
from dstrain.data.forms.form import Given as Given, Source as Source
from dstrain.data.forms.joined import (
    join_datasets as join_datasets,
    join_sources as join_sources,
)
from dstrain.data.forms.listing import (
    beside_table as beside_table,
    left_out as left_out,
)
from dstrain.data.forms.naming import (
    TEXT as TEXT,
    main_column as main_column,
    other_names as other_names,
    parse_columns as parse_columns,
)
from dstrain.data.forms.reading import Reading as Reading, texts_of as texts_of
from dstrain.data.forms.row_files import embedded_folder as embedded_folder

// Stands in for libnvinfer, libnvonnxparser, libnvinfer_plugin and libnvparsers, so that the Python
// bindings of TensorRT can be imported, and their classes looked at, where TensorRT is not. Every
// function gives null: nothing can be built or run with it.
#define GIVES_NULL(name) \
    void *name(void) { return 0; }

GIVES_NULL(createInferBuilder_INTERNAL)
GIVES_NULL(createInferRefitter_INTERNAL)
GIVES_NULL(createInferRuntime_INTERNAL)
GIVES_NULL(createNvOnnxParser_INTERNAL)
GIVES_NULL(createNvOnnxParserRefitter_INTERNAL)
GIVES_NULL(getBuilderPluginRegistry)
GIVES_NULL(getPluginRegistry)
GIVES_NULL(initLibNvInferPlugins)
GIVES_NULL(getInferLibVersion)
GIVES_NULL(getNvOnnxParserVersion)
// TensorRT 8's parsers of other formats.
GIVES_NULL(_ZN11nvuffparser15createUffParserEv)
GIVES_NULL(_ZN11nvuffparser8FieldMapC1EPKcPKvNS_9FieldTypeEi)
GIVES_NULL(_ZN14nvcaffeparser117createCaffeParserEv)
GIVES_NULL(_ZN14nvcaffeparser123shutdownProtobufLibraryEv)
